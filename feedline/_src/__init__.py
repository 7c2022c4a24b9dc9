"""The code behind feedline's public modules. Nothing here is public: names and modules may change in any version.

Its files, and its folders in the order in which data flows through them::

    feed        `Feed`, the training loop's iterator of global batches: `iter`, `next`, `close`
    feed_base   the rest of `Feed`: state, moves, properties, statistics, report, diagnosis
    build       opens the source, plans its reads, and compares the feeds of all processes
    run         composes loader, placement and prefetch into a pipeline that starts at a cursor
    machine     what Linux reports about this host: processors, memory nodes, GPUs, limits of control groups
    bounds      limits on the settings that a feed tunes
    images      JPEG, PNG and other images as rows
    image_limits  refuses images that would take too much memory or time to decode
    drop_in     prefetch_to_mesh: placement and prefetch for any iterator of batches
    options     Order, Reading, Limits and Blocks, validated on construction
    feed_options  FeedOptions, all arguments of a feed; the context in which tools change them
    errors      FeedError and its subclasses
    state       makes the state for a checkpoint, and validates it when it is restored
    record      what a delivered batch cost, and the interface of a listener
    lazy        imports the names of public modules on first use

    order/      which row stands at which position of an epoch: pure functions
    rows/       specs, casts and bad rows; the contract of a source
    sources/    the sources: arrays, files, records, streams, mixtures
    formats/    one module for each file format
    files/      reads bytes of local files, and of objects in a store through a cache; detects changed files
    loader/     rows → process-local batches, by threads or workers; streams of rows
    plan/       computes shapes, memory, and what each process reads, from options and a source. Pure
    placement/  process-local batch → global jax.Array on the mesh
    prefetch/   places batches before the step asks for them
    listen/     what batches cost, what limits a feed, and which settings to change

and the other folders::

    native/     one C file for order and gather, and its ctypes binding
    runtime/    JAX's thread-local settings, forked processes, the exit of the interpreter
    agreement/  communication between processes
    cluster/    joins the processes of a run
      launchers/  one module per launcher: the environment variables by which it describes a process
    trainer/    `fit` trains a model on the batches of any iterator; a bundled MLP
    tools/      the tools of the `feedline` command, one folder each
"""
