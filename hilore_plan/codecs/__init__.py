"""The formats in which a saved tensor may be kept: the place of the codecs.

Empty while the only format is `cast`, which loses nothing and needs no code beyond a dtype. May import `progress`,
`quantities` and `errors`.
"""
