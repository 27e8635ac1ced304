"""Where roles run: inline, on threads, in processes. It moves Structs and knows nothing of what they mean."""
