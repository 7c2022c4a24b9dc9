"""Trains a model of your own on the batches of a feed: `fit`. The bundled MLP is its first user.

::

    fitting      `fit`: checks of its arguments, history, callbacks, the rows of a loss that is not finite
    task         what is trained: initial state, one step, metrics; pure functions without devices
    modes        compiles a task for one device, a mesh, or pmap; practices: donation, dtypes, sharding
    loop         runs a step on every batch and measures it; evaluates, counting each row once
    checkpoints  saves the trainer's state and the feed's with Orbax, and restores them
    model        the MLP (flax.nnx), its loss, and the conversion of images to its input
    live         a callback that shows the loop's progress on a terminal
    logs         callbacks that write it to a file, as CSV or for TensorBoard
    memory       watches what the loop holds in memory, and names what grows

It imports no stage of feedline: a batch is a tree of global arrays from any source.
"""
