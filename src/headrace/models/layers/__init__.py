"""What models are made of: holders of weights, and nothing that computes."""
