"""K-FAC: second-order steps, on one rank or many.

Where to read, in the order of a training step:

- `part`: the step as a whole, which is what a session knows of K-FAC.
- `survey`, `blocks`, `layers`, `norms`, `tied`, `attention`, `convolution`: which layers are
  covered, and the factors A and G of each; `pieces` cuts large factors.
- `capture`: adds to the factors while the model runs.
- `exchange`: `scheduler` sends factors (`messages`) beside the gradients, `accumulator` averages
  them over steps (`averages`), `inverses` has them inverted and sends inverses, `preconditioner`
  multiplies gradients by them. `costs` measures what plans depend on, `spans` notes what happened.
- `inverses`, `lapack`, `eigen`, `precondition`, `symmetric`: the linear algebra, which knows of no
  other rank.
- `planning`: which factors share a message, who inverts what, and in which order. Pure functions.
- `options`: what a user can set.
"""
