"""Meshes, sharding rules and transfers of parameter trees."""
