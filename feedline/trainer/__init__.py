"""A bundled trainer: an MLP that classifies rows, fed by any iterator of batches.

::

    model        the MLP (flax.nnx), and the conversion of images to its input
    learner      initial state, one step, sums over a batch: pure functions without devices
    modes        compiles the learner for one device, a mesh, or pmap
    loop         runs the step on every batch, and measures throughput and input waits
    checkpoints  saves the trainer's state and the feed's with Orbax, and restores them
      checkpoint_checks  refuses damaged and mismatched checkpoints
      folder             validates and locks the checkpoint directory
    evaluate     counts each row of a test set exactly once
    live         shows the loop's progress on a terminal
    memory       watches what the loop holds in memory, and names what grows
      allocations        where live buffers were allocated

It imports no stage of feedline: a batch is a dict of global arrays from any source.
"""
