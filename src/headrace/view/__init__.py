"""How a run looks to a person or a program that follows it: a panel, plain lines, or JSON."""
