"""Environments: values that say which, and vectors of them that step together.

`base` has the two protocols, `toy` small tasks that need no other package; every other file brings in one package of
environments and is the only one that imports it.
"""
