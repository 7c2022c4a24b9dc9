"""What feedline's public modules rest on. Nothing in here is public: names and modules may change in any version.

A map, one folder a stage, in the order in which data flows::

    feed        the loop's iterator of global batches: `next`, its state, where it goes
    life        the part of a feed that starts and stops its runs, and that moves it to another place
    shown       the part of a feed that only reads: properties, statistics, report, diagnosis
    build       opens the source, plans, and compares with the other processes
    run         one pass from a cursor: the three stages composed
    machine     what Linux says of this host: processors, memory nodes, GPUs, limits of control groups
    bounds      what settings that a feed finds may use of the machine
    images      JPEG, PNG and other images as rows
    image_limits  what an image may ask of its decoder
    drop_in     prefetch_to_mesh: placement and prefetch for any iterator of batches
    options     Order, Reading, Limits and Blocks, checked when they are made
    feed_options  what a user asks a feed for, with all defaults; the context in which tools change it
    errors      FeedError and its subclasses
    state       makes the state for a checkpoint, and validates it when it is restored
    record      what a delivered batch cost, and the interface of a listener
    notebook    the tables that these show in a notebook
    lazy        public modules whose names are imported on first use

    order/      which row stands at which position of an epoch: pure functions
    rows/       what a row is, and the contracts of its source
    sources/    what rows are read from
    formats/    one module for each file format
    files/      bytes of one version wherever they lie: a local file, or an object behind the cache on local disk
    loader/     rows → process-local batches, by threads or workers; streams, which come one after the other
    plan/       what follows from the options and a source: who reads what, shapes, memory. One pure value
    placement/  process-local batch → global jax.Array on the mesh
    prefetch/   places batches before the step asks for them
    listen/     what batches cost, what limits a feed, and which settings to change

and the other folders::

    native/     one C file for order and gather, and its ctypes binding
    runtime/    what Python and JAX require of threads and processes
    agreement/  what processes tell each other
    cluster/    joins the processes of a run
      launchers/  what launchers tell the processes that they start
    trainer/    `fit` trains a model on the batches of any feed; a bundled MLP
    tools/      what the `feedline` command runs, one folder each
"""
