"""The methods: one file each, one frozen dataclass in it."""
