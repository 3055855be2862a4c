"""Adapters that put this library's ops into engines and kernel libraries of others; see README.md in this folder.

They stand on top of everything else and nothing imports them. Engines are imported inside functions.
"""
