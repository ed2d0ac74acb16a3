"""What `hybrid-memory plan` says: how many sessions fit, what each holds, what policies and storages buy, and what
peers would hold.
"""
