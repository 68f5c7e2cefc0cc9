"""Running a graph: jobs, schedules, steps, training and the folder that it leaves."""
