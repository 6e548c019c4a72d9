"""What the tests of `outside/` share: the same training in one process, with plain PyTorch."""
