"""The commands of the program, each a module with `main(argv) -> int`, loaded when it is called."""
