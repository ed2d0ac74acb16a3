"""Plans capacity: how many sessions fit, what each holds, and how policies, storages and other engines compare."""
