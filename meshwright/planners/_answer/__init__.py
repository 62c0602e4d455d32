"""The answer of the planner `search`: the chosen plan with its reasons.

chosen      the best plan, by cause and class
compared    why other plans lost
plan_row    a plan as a row of a table, and in words
"""
