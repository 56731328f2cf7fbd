"""Who calls, what each caller may do and how often, and which requests belong to whom."""
