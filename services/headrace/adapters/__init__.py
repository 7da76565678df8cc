"""Outside systems behind small interfaces: etcd, and the codecs of what is stored there."""
