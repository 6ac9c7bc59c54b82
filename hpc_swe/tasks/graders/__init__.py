"""A grader decides which reward a patch gets."""
