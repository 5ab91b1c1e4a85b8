"""One planned row, looked at from all sides: a `Row` of `vlmpack.proof.rows` -> PNG and HTML page.

canvas      rectangles, lines and text; written as SVG (`svg`) or drawn as PNG (`png`)
lanes       `Row` -> its tokens to scale on a canvas: samples, images, loss, positions, CP ranks
            (lines cuts it, thumbs places images, colors and legend say what is what)
table       `Row` -> its figures as text
sheet       lanes, checks and table on one canvas, for the PNG
page        lanes, checks, table and texts as one HTML file
write       the two files
"""
