"""One planned row, looked at from all sides: recipe -> bin -> PNG, HTML page, checks.

Needs no run, no GPU and no weights.

opening     recipe -> the bin that was asked for (by number, by global batch, by a sample's key)
row         bin -> `Row`: the batch that training would get, taken apart, and each sample alone
checks      `Row` -> what must hold of a packed row, recomputed without the collator's code
            (slices_check: of the CP ranks' slices; findings: what both share)
canvas      rectangles, lines and text; written as SVG (`svg`) or drawn as PNG (`png`)
lanes       `Row` -> its tokens to scale on a canvas: samples, images, loss, positions, CP ranks
            (lines cuts it, thumbs places images, colors and legend say what is what)
table       `Row` -> its figures as text
sheet       lanes, checks and table on one canvas, for the PNG
page        lanes, checks, table and texts as one HTML file
write       the two files
"""
