"""The learning policy: a table of means, a line of costs for each replica, and one sum."""
