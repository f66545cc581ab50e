"""Comparisons of ways of serving on live traffic: which is better here, by how much, and from what load on."""
