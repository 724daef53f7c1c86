"""Tiers of cache blocks below main memory: files in a folder.

block_folder   one file for each block: written, read, verified, listed
lane           the folder of one engine, and folders that no engine uses any more
disk_index     which blocks are there, within a number of bytes; pure
breaker        whether a failing disk is tried again; pure
io_threads     what touches a file runs here, never in the core's thread
disk_tier      the tier of one engine
cold_traffic   blocks between the host tier's slots and the tiers below
open_disk      the tier of a configuration
"""
