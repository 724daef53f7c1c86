"""Tiers of cache blocks below main memory: files in folders.

block_folder   one file for each block, or part of one: written, read, verified, listed
block_files    what carries blocks between the host tier's slots and files
slot_files     the same on one rank
rank_files     the same on several: every rank its own part
rank_file_work what one of these does
file_failure   why a file could not be read or written
breaker        whether a failing disk is tried again; pure
io_threads     what touches a file runs here, never in the core's thread
disk_tier      blocks on one volume
disk_index     which blocks are there, within a number of bytes; pure
lane           the folder of one engine, and folders that no engine uses any more
lane_home      the disk tier: a folder of the engine's own
shared_home    a volume of the store: a folder that engines share, and its clean-up
shared_index   what is known of such a volume; pure
store_tier     the store: several volumes, replicas, repair
cold_tier      what the host tier needs of a tier below it
cold_traffic   blocks between the host tier's slots and the tiers below
open_tiers     the tiers of a configuration
"""
