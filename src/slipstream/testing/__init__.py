"""What a third-party drafter needs to test itself: tiny models, exact laws, the contract."""
