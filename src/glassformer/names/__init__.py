"""All that is known of a name before torch is imported, so that a mistyped one is answered at once.

grammar    NAME[@SIZE][+CHANGE...]: text in, pieces out
sizes      @SIZE -> layers, width, heads
known      names of presets, families, packaged checkpoints, changes and corpora
places     files of a checkpoint: found, or the sentence that says what is missing
checks     a whole expression, or the name of a text, refused if it names nothing
"""
