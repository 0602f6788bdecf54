"""The formats in which a saved tensor may be kept, at a loss or (`cast`) without.

Takes tensors of any layout and gives `Encoded` ones, and back: `base` has the interface, `registry` the codecs by name,
and each format has a file. May import `progress`, `quantities` and `errors`.
"""
