"""The tools behind the `feedline` command, one folder each.

::

    main      the table of subcommands, above all folders
    targets   builds the feed that a user names: of module:make_feed, or of a path
    cli/      what subcommands share: help, progress, SOURCE and its options, what Ctrl-C does
    inspect/  what a feed will read and place, without devices
    audit/    does a program deliver the same rows on other layouts?
    doctor/   what keeps a machine, a feed or a running job from being fast
    bench/    rows/s of a feed, and what modes and practices of the trainer bring, on this machine
    convert/  rows of any source as files of one format, in shards
    launch    one command as several processes on this machine
    train/    trains the bundled MLP
"""
