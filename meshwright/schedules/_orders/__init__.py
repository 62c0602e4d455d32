"""Methods to find an order of actions, shared by the schedules.

user_schedule         schedules of users: files and functions
order_strings         orders of forwards and backwards, as words
order_search          the best order under a memory cap
split_orders          orders with split backwards
fill_weight_halves    places weight halves into gaps
job_shop              split backwards under a memory cap
window_bound          a lower bound by refutation
chimera_slots         slots of Chimera
wave                  zigzag and V placements
no_flush              1F1B without a flush
cyclic_forms          lists of cyclic data parallelism
cyclic_owners         its ZeRO form
cyclic_turns          its stagger
"""
