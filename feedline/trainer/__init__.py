"""A bundled trainer: an MLP that classifies rows, fed by any iterator of batches.

::

    model        the MLP (flax.nnx), and what it makes of an image
    learner      initial state, one step, sums over a batch     pure, knows no device
    modes        compiles the learner for one device, a mesh, or pmap
    loop         runs the step on every batch, and measures
    checkpoints  saves state and feed with Orbax, and brings them back
      checked    what is refused of one
      folder     their directory: checked, and used by one run at a time
    evaluate     counts each row of a test set exactly once
    live         shows the loop's progress on a terminal

It imports no stage of feedline: a batch is a dict of global arrays, whoever made it.
"""
