"""One planned row, looked at from all sides: a `ShownRow` of `vlmpack.proof.rows` -> HTML page.

canvas  rectangles, lines, text and images, written as SVG
lanes   the row's tokens to scale on a canvas: samples, images, loss, positions, CP ranks
page    lanes, checks, figures and texts as one HTML file
"""
