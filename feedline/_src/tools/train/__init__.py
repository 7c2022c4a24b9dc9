"""`feedline train`, and its data sets.

::

    command, options  the command, and its options as plain values
    train_and_test    builds the feeds, and trains and tests the bundled MLP
    labelled          a training part and a test part of the digits, or of a user's files
    digits/           handwritten digits that ship with feedline; README.md names their source and licence
"""
