"""S3 and what speaks its protocol (Ceph RGW, MinIO): requests, reads, writes, listings, traits of servers."""
