"""Set-up of the systems that Morph is compared with, and runners for those that are no servers."""
