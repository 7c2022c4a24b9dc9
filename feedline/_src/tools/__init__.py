"""The tools behind the `feedline` command, a folder or module each.

::

    main      the `feedline` command, which runs subcommands
    targets   builds the feed that a user names, as module:make_feed or a path
    cli/      what subcommands share: help, progress, SOURCE and its options, Ctrl-C
    inspect/  what a feed will read and place, without devices
    audit/    whether a feed delivers the same rows on all layouts
    doctor/   what slows down a machine, a feed or a running job
    bench/    rows/s of a feed, and effects of the trainer's modes and practices, on this machine
    convert/  writes rows of any source as file shards of one format
    launch    starts one command as several processes on this machine
    train/    trains the bundled MLP
"""
