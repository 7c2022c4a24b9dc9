"""Trains a model of your own on the batches of a feed: `fit`. The bundled MLP is its first user.

::

    fitting      `fit`: the loop with checkpoints, evaluation, history and callbacks
      fit_checks         refuses arguments that are wrong, or do not fit each other
    task         what is trained: initial state, one step, metrics; pure functions without devices
    practices    how a step is compiled and run: donation, dtypes, sharding
    modes        compiles a task for one device, a mesh, or pmap
    loop         runs the step on every batch, and measures throughput and input waits
    evaluate     counts each row of a test set exactly once
    checkpoints  saves the trainer's state and the feed's with Orbax, and restores them
      checkpoint_checks  digests of their files; refuses damaged and mismatched ones
      folder             validates and locks the checkpoint directory
    model        the MLP (flax.nnx), its loss, and the conversion of images to its input
    live         a callback that shows the loop's progress on a terminal
    logs         callbacks that write it to a file; a CSV file
      tensorboard        event files for TensorBoard, with the metrics of a feed
    memory       watches what the loop holds in memory, and names what grows

It imports no stage of feedline: a batch is a tree of global arrays from any source.
"""
