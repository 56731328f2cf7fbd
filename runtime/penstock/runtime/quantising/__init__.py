"""Makes a quantised checkpoint of one in floats (`penstock quantize`).

options.py      what a caller may choose
grids.py        the codes' scales and zeros, and plain rounding
gptq.py         rounds the columns of a weight one after the other, and corrects those that follow
scaling.py      AWQ: moves what matters most into a finer part of the grid
layerwise.py    computes a model with the weights of one layer in memory at a time
texts.py        the texts on which inputs are watched, and those by which the result is judged
output.py       writes the folder in the form of compressed-tensors
quantise.py     puts these together, and reports what it cost
"""
