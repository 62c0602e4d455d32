"""What each rank is doing, and which rank failed first.

watchdog    the thread that watches
status      what this rank is doing
board       shared keys of a job
failure     records of failures, and their text
"""
