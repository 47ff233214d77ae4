# The tasks of ./run by their names, for those who type make. Arguments: make test ARGS="-k tidy"
TASKS := setup demo test lint check bench docs wheel

.PHONY: $(TASKS)
$(TASKS):
	@./run $@ $(ARGS)
