"""One planned row, looked at from all sides: a `ShownRow` of `vlmpack.proof.rows` -> HTML page.

lanes  the row's tokens to scale, drawn as SVG: samples, images, loss, positions, CP ranks
page   lanes, checks, figures and texts as one HTML file
"""
