"""One planned row, looked at from all sides: a `ShownRow` of `vlmpack.proof.rows` -> HTML page.

canvas      rectangles, lines, text and images, written as SVG
lanes       the row's tokens to scale on a canvas: samples, images, loss, positions, CP ranks
            (lines cuts it, thumbs places images, legend says which colour is what)
table       the row's figures as text
page        lanes, checks, table and texts as one HTML file
"""
