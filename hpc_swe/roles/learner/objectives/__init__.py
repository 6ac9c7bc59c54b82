"""Define what each trained token contributes to the loss: one objective per file, whose name selects it.

pi are the weights being trained, mu those that sampled the tokens, and A is the advantage. To add an
objective, write `<name>.py` here with a subclass of `TokenObjective` called `<Name>`, and add the name to
`LossConfig.objective`; config/conflicts.py lists which objectives read a bound.
"""
