"""What a run can say of itself: where a step's time goes, what it computes, what memory it takes, who is slow."""
