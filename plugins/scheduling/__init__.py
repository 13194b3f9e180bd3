"""The "scheduling" slot: who runs next (`unified`, `priority`), and how batches were made before (`two_phase`, `static`)."""
