"""K-FAC: second-order steps, on one rank or many.

Where to read, in the order of a training step:

- `callback`: the step as a whole, which is what a session knows of K-FAC; factors averaged over
  steps, and their damping.
- `survey`, `blocks`, `layers`, `convolution`: which layers are covered, and the factors A and G of
  each.
- `capture`: adds to the factors while the model runs.
- `scheduler`: sends factors beside the gradients.
- `preconditioner`: has them inverted, sends inverses, and multiplies gradients by them.
- `factors`, `inverses`: the linear algebra, which knows of no other rank.
- `plans`, `placement`, `overlap`: which factors share a message, which rank inverts what, and in
  which order. Pure functions; `costs` measures what they depend on.
- `curvature`: what a user can set.
"""
