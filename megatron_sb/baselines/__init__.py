"""What stick-breaking attention is compared with: softmax attention with several positions, and geometric attention."""
