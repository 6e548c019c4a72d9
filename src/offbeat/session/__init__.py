"""`attach`: hooks go in, hooks come out; events go to the strategy's callbacks."""
