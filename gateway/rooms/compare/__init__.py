"""Comparisons on live traffic: which way of serving is better here, by how much, and from what load on."""
