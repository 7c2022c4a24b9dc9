"""The tools behind the `feedline` command, a folder or module each.

::

    main           runs the subcommands of `feedline`
    targets        builds the feed that a user names, as module:make_feed or a path
    cli/           what subcommands share: help, progress, SOURCE and its options, Ctrl-C
    inspect/       shows what a feed will read and place, without devices
    audit/         checks whether a feed delivers the same rows on all layouts
    doctor/        finds what slows down a machine, a feed or a running job
    bench/         measures a feed, and the effects of the trainer's modes and practices, on this machine
    convert/       writes rows of any source as file shards of one format
    launch         starts one command as several processes on this machine
    train/         trains the bundled MLP
    processes      a `map` over processes on this machine, for conversions and benchmarks
    process_group  a process group that is killed when the process that created it ends
"""
