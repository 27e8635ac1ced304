"""What a run leaves behind: a folder that can be looked at, evaluated, resumed and compared."""
