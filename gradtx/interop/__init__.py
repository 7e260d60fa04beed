"""What has to be known of other libraries."""
