from holdfast.train.command import worker_main

worker_main()
